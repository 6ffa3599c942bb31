"""Entry point of `accelerate launch -m hf_cocodc.train RECIPE`: each rank that a launcher has started runs it once."""

from .settings.environment import quiet_torch

if __name__ == "__main__":
    quiet_torch()  # before torch is imported
    from .training.region import end
    from .training.train import main

    end(main())
