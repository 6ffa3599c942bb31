"""The training script of a site of NVFlare, which its job process runs: the common loop over the Client API."""

import json
import sys
import traceback
from pathlib import Path

import nvflare.client as flare
import torch

from tests.benchmarks import federated, worker
from tests.benchmarks.workload import Region


def main(name: str) -> None:
    flare.init()
    region = federated.region_of(flare.get_site_name())
    spec = json.loads(Path(f"{name}.{region}.spec.json").read_text())
    try:
        torch.set_num_threads(1)
        place = Region(**{**spec["place"], "folder": Path(spec["place"]["folder"])})
        found = worker.train(place, spec["row"])
    except BaseException:
        found = {"failed": traceback.format_exc()[-400:]}
    federated.found_by(name, region, found)


if __name__ == "__main__":
    main(sys.argv[1])
