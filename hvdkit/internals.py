"""The names of TensorFlow and Keras that hvdkit needs and that are not in their public APIs, each with the reason.

All other files import these names from here, so that a new version of TensorFlow or Keras is compared with one list.
A name is looked up when it is imported: the table itself loads neither library.

Not imports, but private as well: attributes of Keras's objects, such as ``Trainer._jit_compile``,
``Layer._flatten_layers``, ``CompileLoss._flat_losses`` or ``Optimizer._clip_gradients``, and methods of TensorFlow's
graphs, such as ``Graph._create_op_internal``. They are used where no public one exists.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras.src.backend.common import global_state as global_state
    from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
    from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as TensorFlowTrainer
    from keras.src.losses.loss import reduce_weighted_values as reduce_weighted_values
    from keras.src.losses.loss import squeeze_or_expand_to_same_rank as squeeze_or_expand_to_same_rank
    from keras.src.random.seed_generator import global_seed_generator as global_seed_generator
    from keras.src.trainers import data_adapters as data_adapters
    from keras.src.trainers.data_adapters import array_slicing as array_slicing
    from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn as make_class_weight_map_fn
    from keras.src.utils import is_default as is_default
    from keras.src.utils.file_utils import is_remote_path as is_remote_path
    from keras.src.utils.io_utils import ask_to_proceed_with_overwrite as ask_to_proceed_with_overwrite
    from keras.src.utils.python_utils import pythonify_logs as pythonify_logs
    from tensorflow.python.eager import context as context
    from tensorflow.python.eager import record as record
    from tensorflow.python.framework.config import is_op_determinism_enabled as is_op_determinism_enabled
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op as get_registered_kernels_for_op
    from tensorflow.python.ops import control_flow_util as control_flow_util
    from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow_v2_func_graphs
    from tensorflow.python.ops import handle_data_util as handle_data_util
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable as ResourceVariable
    from tensorflow.python.util import tf_stack as tf_stack


@dataclass(frozen=True)
class _Home:
    """Where a private name is defined in all versions that docs/compatibility.md lists, and why it is needed."""

    module: str
    attribute: str | None  # None: the name is the module
    reason: str


_ADAPTERS = "keras.src.trainers.data_adapters"

_HOMES: Mapping[str, _Home] = {
    # TensorFlow 2.16 to 2.22
    "ResourceVariable": _Home(
        "tensorflow.python.ops.resource_variable_ops", "ResourceVariable", "a variable that tf.function does not track"
    ),
    "context": _Home("tensorflow.python.eager.context", None, "TensorFlow's seed in eager mode can only be read here"),
    "control_flow_util": _Home(
        "tensorflow.python.ops.control_flow_util", None, "tells whether an op is in the body of a loop or a branch"
    ),
    "control_flow_v2_func_graphs": _Home(
        "tensorflow.python.ops.control_flow_v2_func_graphs", None, "the classes of the graphs of loops and branches"
    ),
    "handle_data_util": _Home(
        "tensorflow.python.ops.handle_data_util", None, "copies what a graph knows about the contents of a handle"
    ),
    "is_op_determinism_enabled": _Home(
        "tensorflow.python.framework.config", "is_op_determinism_enabled", "the public API can only switch it on"
    ),
    "record": _Home("tensorflow.python.eager.record", None, "pauses all tapes, not only one that the caller holds"),
    "get_registered_kernels_for_op": _Home(
        "tensorflow.python.framework.kernels", "get_registered_kernels_for_op", "the operations that XLA compiles"
    ),
    "tf_stack": _Home("tensorflow.python.util.tf_stack", None, "the source line that an op gets, at the cost of an op"),
    # Keras 3.12 to 3.16
    "ArrayDataAdapter": _Home(f"{_ADAPTERS}.array_data_adapter", "ArrayDataAdapter", "fit's batches of arrays"),
    "DataAdapter": _Home(f"{_ADAPTERS}.data_adapter", "DataAdapter", "the base class of what fit iterates over"),
    "PyDatasetAdapter": _Home(f"{_ADAPTERS}.py_dataset_adapter", "PyDatasetAdapter", "fit's batches of a PyDataset"),
    "TFDatasetAdapter": _Home(f"{_ADAPTERS}.tf_dataset_adapter", "TFDatasetAdapter", "fit's batches of a tf.data"),
    "array_slicing": _Home(f"{_ADAPTERS}.array_slicing", None, "validation_split takes the rows that Keras takes"),
    "data_adapter_utils": _Home(f"{_ADAPTERS}.data_adapter_utils", None, "fit's unpacking of (x, y, sample_weight)"),
    "data_adapters": _Home(_ADAPTERS, None, "tells which adapter fit would take"),
    "make_class_weight_map_fn": _Home(
        f"{_ADAPTERS}.tf_dataset_adapter", "make_class_weight_map_fn", "class_weight with batches of a tf.data"
    ),
    "TensorFlowTrainer": _Home(
        "keras.src.backend.tensorflow.trainer", "TensorFlowTrainer", "tells Keras's own methods from a subclass's"
    ),
    "ask_to_proceed_with_overwrite": _Home(
        "keras.src.utils.io_utils", "ask_to_proceed_with_overwrite", "save(overwrite=False) asks as Keras does"
    ),
    "get_keras_mask": _Home("keras.src.backend.common.masking", "get_keras_mask", "the mask of a layer's output"),
    "set_keras_mask": _Home("keras.src.backend.common.masking", "set_keras_mask", "the mask of a layer's output"),
    "global_seed_generator": _Home(
        "keras.src.random.seed_generator", "global_seed_generator", "the state of draws without a seed, for checkpoints"
    ),
    "global_state": _Home("keras.src.backend.common.global_state", None, "draws without a seed that differ by rank"),
    "is_default": _Home("keras.src.utils", "is_default", "tells whether a callback wants to be called for each batch"),
    "is_remote_path": _Home("keras.src.utils.file_utils", "is_remote_path", "paths that save writes to a store"),
    "pythonify_logs": _Home("keras.src.utils.python_utils", "pythonify_logs", "logs as callbacks get them in fit"),
    "reduce_weighted_values": _Home(
        "keras.src.losses.loss", "reduce_weighted_values", "a loss object's values and weights, reduced as Keras does"
    ),
    "squeeze_or_expand_to_same_rank": _Home(
        "keras.src.losses.loss", "squeeze_or_expand_to_same_rank", "y_true and y_pred as a loss object compares them"
    ),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(home.module)
    return module if home.attribute is None else getattr(module, home.attribute)
