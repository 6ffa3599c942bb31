"""Entry point of `accelerate launch -m hf_cocodc.train RECIPE`: each rank of a region runs it once."""

from .training.train import end, main

if __name__ == "__main__":
    end(main())
