"""Whole checkpoints: a safetensors file or a sharded folder in, the same tensors in other formats out."""

from .jobs import Job, plan_jobs
from .recipe import Recipe, Rule
from .run import convert_checkpoint
from .source import Source, open_source

__all__ = ["Job", "Recipe", "Rule", "Source", "convert_checkpoint", "open_source", "plan_jobs"]
