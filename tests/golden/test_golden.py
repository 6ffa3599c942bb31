"""Golden trajectories: the numbers that each method gave when it was accepted.

The oracles say what is right; these notice any change, of the parts that no oracle covers too (4-bit codes, ranks, adaptive
choices). The inner optimizer is SGD for all. `pytest tests/golden --write-golden` rewrites them; docs/internals/testing.md
says when that is allowed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_cocodc.newer import known
from hf_cocodc.settings import OuterConfig
from tests.methods import of_paper, small
from tests.toys import Blocks, Region, run

FOLDER = Path(__file__).parent
STEPS = 40
SETTINGS = small(
    {
        "diloco": {},
        "streaming": {"num_fragments": 3, "overlap_steps": 3},
        "eager": {"num_fragments": 3, "fragment_pattern": "strided"},
        "co2": {"outer_momentum": 0.3, "clip_momentum": 0.2},
        "dilocox": {"rank": 2},
        "cocodc": {"num_fragments": 3, "overlap_steps": 3, "sends_per_interval": 4},
    }
) | {"sparseloco": {"top_k": 5}, "muloco": {}, "radial": {"method": "diloco", "mean": "radial"}}


def trajectory(name: str) -> list[list[float]]:
    """Theta of region 0 and theta of region 1 after every eighth step and after finish(), on three quadratics a region."""
    start = [
        torch.linspace(-1, 1, 24).view(4, 6),
        torch.linspace(0, 1, 12).view(3, 4),
        torch.linspace(-2, 0, 7),
    ]

    def build(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Blocks(start)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def live(region: Region) -> list[torch.Tensor]:
        states = []
        for step in range(1, STEPS + 1):
            for position, vector in enumerate(region.model.parameters()):
                goal = torch.linspace(-1, 1, vector.numel()).flip(0).view_as(vector) * (region.index + 1)
                vector.grad = (vector.detach() - goal) * (1 + 0.1 * ((step + position) % 3))
            region.step()
            if step % 8 == 0:
                states.append(shown(region))
        region.synchronizer.finish()
        return [*states, shown(region)]

    def shown(region: Region) -> torch.Tensor:
        if region.index:
            return torch.cat([vector.detach().reshape(-1).clone() for vector in region.model.parameters()])
        return torch.cat([state.global_params for state in region.synchronizer.fragments])

    config = OuterConfig(
        **{
            "method": name,
            "sync_interval": 8,
            **of_paper(SETTINGS[name].get("method", name)),
            **SETTINGS[name],
        }
    )
    return [tensor.tolist() for states in run(3, config, build, live)[:2] for tensor in states]


@pytest.mark.parametrize("name", [*known(), "radial"])
def test_the_numbers_are_still_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """To rounding: other processors may sum norms in another order."""
    ours, file = trajectory(name), FOLDER / f"{name}.json"
    if request.config.getoption("--write-golden"):
        file.write_text(json.dumps(ours) + "\n", encoding="utf-8")
    golden = json.loads(file.read_text(encoding="utf-8"))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(golden), atol=1e-5, rtol=0)
    assert ours[0] != ours[-1]
