"""What `accelerate launch -m hf_cocodc.train RECIPE` runs, once in each rank of a region."""

from .training.train import end, main

if __name__ == "__main__":
    end(main())
