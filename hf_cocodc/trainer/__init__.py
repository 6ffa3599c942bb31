"""Everything that touches Transformers' Trainer."""
