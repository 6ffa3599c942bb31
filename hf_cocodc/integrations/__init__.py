"""Where training loops meet the engine: Trainer's callback and a plain Accelerate loop."""
