"""probemon: watch a language model from the inside, token by token.

from probemon import DynamicProbeManager

manager = DynamicProbeManager("demo")    # or a folder, or org/name on the Hugging Face hub
with manager.attach(model, tokenizer) as run:
    out = model.generate(**inputs)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probemon.core.aggregate import Attention as Attention
    from probemon.core.aggregate import Each as Each
    from probemon.core.aggregate import Ema as Ema
    from probemon.core.aggregate import Max as Max
    from probemon.core.aggregate import Mean as Mean
    from probemon.core.aggregate import RollingLogit as RollingLogit
    from probemon.core.aggregate import RollingMax as RollingMax
    from probemon.core.aggregate import RollingMean as RollingMean
    from probemon.core.baselines import Rank as Rank
    from probemon.core.baselines import ZScore as ZScore
    from probemon.core.scores import Coverage as Coverage
    from probemon.core.scores import RowState as RowState
    from probemon.core.scores import Scores as Scores
    from probemon.errors import ProbemonError as ProbemonError
    from probemon.lab.corpora.analysis_folder import Analysis as Analysis
    from probemon.lab.importers.generic import import_safetensors as import_safetensors
    from probemon.lab.importers.generic import import_weights as import_weights
    from probemon.lab.importers.hatcat import import_pack as import_pack
    from probemon.lab.importers.lie_detectors import import_lie_detectors as import_lie_detectors
    from probemon.lab.importers.repeng import import_control_vector as import_control_vector
    from probemon.lab.importers.saelens import import_sae as import_sae
    from probemon.lab.importers.sklearn import import_estimators as import_estimators
    from probemon.lab.training.collect import collect as collect
    from probemon.lab.training.trainer import train as train
    from probemon.manager import DynamicProbeManager as DynamicProbeManager
    from probemon.monitor.function_probes import function_probe as function_probe
    from probemon.monitor.kept_states import KeepStates as KeepStates
    from probemon.monitor.kept_states import read_states as read_states
    from probemon.monitor.result import Result as Result
    from probemon.monitor.rules import Event as Event
    from probemon.monitor.run import MonitorRun as MonitorRun
    from probemon.monitor.sinks import CallbackSink as CallbackSink
    from probemon.monitor.sinks import JsonLinesSink as JsonLinesSink
    from probemon.monitor.sinks import MemorySink as MemorySink
    from probemon.monitor.sinks import ParquetSink as ParquetSink
    from probemon.monitor.stream import TokenEvent as TokenEvent
    from probemon.monitor.summary import Summary as Summary
    from probemon.monitor.summary import summarise as summarise
    from probemon.packs.attached import attach_below as attach_below
    from probemon.packs.pack import ProbePack as ProbePack

# Imported at first use: transformers takes seconds, and inspecting a pack needs none of it.
_MODULES = {
    "Analysis": "lab.corpora.analysis_folder",
    "Attention": "core.aggregate",
    "CallbackSink": "monitor.sinks",
    "Coverage": "core.scores",
    "DynamicProbeManager": "manager",
    "Each": "core.aggregate",
    "Ema": "core.aggregate",
    "Event": "monitor.rules",
    "JsonLinesSink": "monitor.sinks",
    "KeepStates": "monitor.kept_states",
    "Max": "core.aggregate",
    "Mean": "core.aggregate",
    "MemorySink": "monitor.sinks",
    "MonitorRun": "monitor.run",
    "ParquetSink": "monitor.sinks",
    "ProbePack": "packs.pack",
    "ProbemonError": "errors",
    "Rank": "core.baselines",
    "Result": "monitor.result",
    "RollingLogit": "core.aggregate",
    "RollingMax": "core.aggregate",
    "RollingMean": "core.aggregate",
    "RowState": "core.scores",
    "Scores": "core.scores",
    "Summary": "monitor.summary",
    "TokenEvent": "monitor.stream",
    "ZScore": "core.baselines",
    "attach_below": "packs.attached",
    "collect": "lab.training.collect",
    "function_probe": "monitor.function_probes",
    "import_control_vector": "lab.importers.repeng",
    "import_estimators": "lab.importers.sklearn",
    "import_lie_detectors": "lab.importers.lie_detectors",
    "import_pack": "lab.importers.hatcat",
    "import_sae": "lab.importers.saelens",
    "import_safetensors": "lab.importers.generic",
    "import_weights": "lab.importers.generic",
    "read_states": "monitor.kept_states",
    "summarise": "monitor.summary",
    "train": "lab.training.trainer",
}
__all__ = [*_MODULES, "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'probemon' has no attribute {name!r}")
    try:
        return getattr(import_module(f"probemon.{_MODULES[name]}"), name)
    except OSError:
        from probemon.util.cache_folders import check_import_folders

        check_import_folders()
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
