"""Whole checkpoints: a safetensors file or a sharded folder in, the same tensors in other formats out."""

from .executors import Workers, open_workers
from .jobs import Job, plan_jobs
from .parts import Part
from .recipe import Recipe, Rule
from .run import bytes_to_convert, convert_checkpoint, merge_parts
from .source import Source, open_source

__all__ = [
    "Job", "Part", "Recipe", "Rule", "Source", "Workers", "bytes_to_convert", "convert_checkpoint", "merge_parts",
    "open_source", "open_workers", "plan_jobs",
]  # fmt: skip
