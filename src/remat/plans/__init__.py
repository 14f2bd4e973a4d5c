"""Pure planning over traces: what to keep and what to compute again."""
