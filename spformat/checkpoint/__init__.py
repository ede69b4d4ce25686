"""Whole checkpoints: a safetensors file or a sharded folder in, the same tensors in other formats out.

What is known at each stage of a conversion, and the module that declares it:

    stage             of a tensor                    of an output file           of the whole
    planned           TensorPlan (tensor_plans)      FilePlan (parts)            Conversion (conversion)
    sent to a worker                                 FileTask (parts)            Part (parts): one share of many
    done              TensorOutcome (tensor_plans)   FileOutcome (parts)         ConversionReport (run)

A large matrix is converted in row chunks: ChunkPlan, ChunkCounts and ChunkEncoder (row_chunks), and ChunkDecoder on the
way back to dense (expand).
"""

from .executors import Workers, open_workers
from .journals import finished_files
from .parts import Part
from .recipe import Recipe, Rule
from .run import bytes_to_convert, convert_checkpoint, merge_parts
from .source import Source, open_source
from .tensor_plans import TensorPlan, plan_tensors

__all__ = [
    "Part",
    "Recipe",
    "Rule",
    "Source",
    "TensorPlan",
    "Workers",
    "bytes_to_convert",
    "convert_checkpoint",
    "finished_files",
    "merge_parts",
    "open_source",
    "open_workers",
    "plan_tensors",
]  # fmt: skip
