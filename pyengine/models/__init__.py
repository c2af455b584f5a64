"""The floor that knows models: configurations, families, weights, and the one forward pass."""

from pyengine.models.checkpoint import Checkpoint, open_checkpoint
from pyengine.models.config import describe, load_config
from pyengine.models.decoder import Decoder, StepBuffers
from pyengine.models.families import families
from pyengine.models.loading import Weights, load_weights
from pyengine.models.memory import MemoryPlan, memory_plan
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import WeightPlan, WeightTypes, parameter_count, plan_weights

__all__ = [
    "Checkpoint",
    "Decoder",
    "DecoderSpec",
    "MemoryPlan",
    "ModelConfig",
    "StepBuffers",
    "WeightPlan",
    "WeightTypes",
    "Weights",
    "describe",
    "families",
    "load_config",
    "load_weights",
    "memory_plan",
    "open_checkpoint",
    "parameter_count",
    "plan_weights",
]
