"""Examination: the independent checks of doctor.

examination = Examination("demo", ["demo"], device="cpu", dtype="auto", alert_set=None, strict=False)
examination.run(load)                  # load(name, device, dtype): model and tokenizer
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from probemon import __version__
from probemon.cli.common import make_manager
from probemon.engine.build import choose_for
from probemon.engine.kernels import cache_folder, check_device
from probemon.errors import ProbemonError
from probemon.host.abilities import Abilities
from probemon.host.compatibility import model_problems
from probemon.host.internals import is_wrapping_tensor
from probemon.host.loading import slow_number
from probemon.host.model import find_layers, unwrap
from probemon.host.tap import Tap
from probemon.manager import DynamicProbeManager
from probemon.monitor.canary import MOST_DIFFERENCE, Canary
from probemon.monitor.check import FAILED, OK, WARNING, Check
from probemon.monitor.health import Health
from probemon.packs.group import AnyPack, PackGroup, join_packs, open_one
from probemon.packs.pack import ProbePack
from probemon.util.cache_folders import REMEDY, is_temporary
from probemon.util.counted import counted

Load = Callable[[str, str, str], tuple[Any, Any]]
_CANARY_TOKENS = 6
_NOT_TRIED = "Fix what failed above, and run this again."
_CACHE_REMEDY = f"{REMEDY[0].upper()}{REMEDY[1:]}."


class Examination:
    """Adds to `checks`. `pack`, `host`, `tokenizer`: None if not loaded."""

    def __init__(
        self, model: str, packs: Sequence[str], *, device: str, dtype: str, alert_set: str | None, strict: bool
    ) -> None:
        self._name, self._names, self._dtype, self._alert_set, self._strict = model, packs, dtype, alert_set, strict
        self._device, self.checks = device, list[Check]()
        self.pack: AnyPack | None = None
        self.host: Any = None
        self.tokenizer: Any = None
        self._manager: DynamicProbeManager | None = None

    @property
    def health(self) -> Health:
        """The checks so far."""
        return Health(tuple(self.checks))

    def run(self, load: Load) -> None:
        """Run every check."""
        self._try("versions", "Install probemon again: pip install --upgrade probemon.", _versions)
        self._try("device", "Choose another --device; what follows was tried on the CPU.", self._look_at_device)
        self._try("threads", "Give --threads a number.", _threads)
        self._open_packs()
        self._try("model", "Give a folder, a name on the hub, or demo, as probemon watch takes it.", self._load, load)
        self._after("fit", self._fit, "Use a pack that was made for this model, or the model that it names.")
        self._after("sites", self._sites, "Use a pack that reads other sites, or another model.")
        self._after(
            "tokenizer", self._look_at_tokenizer, "Give the model the tokenizer that it was trained with.", False
        )
        self._kernel()
        self._sing()

    # -- independent checks ----------------------------------------------------------------------

    def _try(self, name: str, remedy: str, check: Callable[..., Check], *arguments: Any) -> None:
        try:
            self.checks.append(check(*arguments))
        except Exception as error:
            text = " ".join(str(error).split())
            is_expected = isinstance(error, ProbemonError)
            self.checks.append(Check(name, FAILED, text if is_expected else f"{type(error).__name__}: {text}", remedy))

    def _after(self, name: str, check: Callable[[], Check], remedy: str, needs_pack: bool = True) -> None:
        """Add a check that needs the model and maybe the pack."""
        missing = [what for what, have in (("model", self.host), ("pack", self.pack)) if have is None]
        if "model" in missing or (needs_pack and missing):
            self.checks.append(Check(name, WARNING, f"not tried, for want of a {missing[0]}", _NOT_TRIED))
        else:
            self._try(name, remedy, check)

    # -- the machine -----------------------------------------------------------------------------

    def _look_at_device(self) -> Check:
        wanted, self._device = self._device, "cpu"
        device = check_device(wanted)
        self._device = wanted
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            name = torch.cuda.get_device_name(device)
            return Check("device", OK, f"{device}, {name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            return Check("device", OK, f"{device}; there is a GPU, too ({name}: --device cuda)")
        return Check("device", OK, f"{device}; torch {torch.__version__} sees no GPU, and none is needed")

    # -- packs and model -------------------------------------------------------------------------

    def _open_packs(self) -> None:
        named: list[tuple[str, ProbePack]] = []

        def opened(text: str) -> Check:
            named.append(open_one(text, alone=len(self._names) == 1, verify=True))
            name, pack = named[-1]
            golden = "it records no scores" if pack.golden_error is None else "its recorded scores come out"
            return Check("pack", OK, f"{name}: {counted(pack.n_probes, 'probe')}, every file has its hash, {golden}")

        for text in self._names:
            self._try("pack", "Fetch or write the pack again; probemon inspect shows what is in one.", opened, text)
        if len(named) == len(self._names):
            try:
                self.pack = join_packs(named, self._alert_set)
            except ProbemonError as error:
                self.checks.append(Check("pack", FAILED, str(error), "Name packs and sets as probemon inspect does."))

    def _load(self, load: Load) -> Check:
        self.host, self.tokenizer = load(self._name, self._device, self._dtype)
        n_weights = sum(weight.numel() for weight in self.host.parameters())
        number = str(self.host.dtype).removeprefix("torch.")
        plain = [(name, weight) for name, weight in self.host.named_parameters() if not is_wrapping_tensor(weight)]
        bad = [name for name, weight in plain if not bool(torch.isfinite(weight).all())]
        if bad:
            what = f"{len(bad)} weights hold values that are not numbers, the first is {bad[0]}"
            return Check("model", FAILED, what, "Fetch or convert the model again, or try another --dtype.")
        what = f"{type(self.host).__name__}, {n_weights / 1e6:,.0f} M weights in {number}"
        if slow_number(self.host):
            what += ", which this CPU has no instructions for: --dtype float32 reads texts several times faster"
        return Check("model", OK, what)

    def _fit(self) -> Check:
        assert self.pack is not None
        problems = model_problems(self.pack, unwrap(self.host), strict=True)
        if not problems:
            return Check("fit", OK, "the pack was made for these weights")
        remedy = "Use the model that the pack names, or take its scores for what they are."
        return Check("fit", FAILED if self._strict else WARNING, "; ".join(problems), remedy)

    def _sites(self) -> Check:
        assert self.pack is not None
        model, sites = unwrap(self.host), list(self.pack.sites)
        Tap(model, sites, lambda site, hidden: None)
        Abilities(model).check_streams(sites)
        return Check("sites", OK, f"{', '.join(sites)} of {len(find_layers(model)[1])} layers can be read")

    def _look_at_tokenizer(self) -> Check:
        n_ids, n_rows = len(self.tokenizer), self.host.get_input_embeddings().num_embeddings
        if n_ids > n_rows:
            what = f"the tokenizer has {n_ids:,} tokens, and the model embeddings for {n_rows:,}"
            return Check("tokenizer", FAILED, what, "Give the model the tokenizer that it was trained with.")
        has = "a chat template" if getattr(self.tokenizer, "chat_template", None) else "no chat template"
        return Check("tokenizer", OK, f"{n_ids:,} tokens, {has}")

    # -- kernel and scores -----------------------------------------------------------------------

    def _kernel(self) -> None:
        if self.pack is None:
            self.checks.append(Check("kernel", WARNING, "not tried, for want of a pack", _NOT_TRIED))
            return
        self._try("cache", _CACHE_REMEDY, self._look_at_cache)
        self._try("kernel", "Give another --device, or install what is missing.", self._make_manager)

    def _look_at_cache(self) -> Check:
        assert self.pack is not None
        parts = list(self.pack.packs.values()) if isinstance(self.pack, PackGroup) else [self.pack]
        impl, _ = choose_for(parts, None, check_device(self._device))
        folder = cache_folder(impl)
        if folder is None:
            return Check("cache", OK, f"{impl} compiles nothing")
        if not folder:
            return Check("cache", WARNING, "no folder can be written, so every start compiles again", _CACHE_REMEDY)
        if is_temporary(Path(folder)):
            what = f"compiled code is kept in {folder}, for want of another folder that can be written"
            return Check("cache", WARNING, what, _CACHE_REMEDY)
        return Check("cache", OK, f"compiled code is kept in {folder}")

    def _make_manager(self) -> Check:
        assert self.pack is not None
        manager = make_manager(self.pack, device=self._device)
        what = (
            f"{manager.impl} ({manager.impl_why}); {manager.strategy.step} for a token, {manager.strategy.batch} for"
            " a prompt"
        )
        worst = _golden_difference(manager)
        if not worst <= MOST_DIFFERENCE:
            what = f"{manager.impl} gives the pack's recorded states scores that are {worst:.2g} off"
            return Check("kernel", FAILED, what, "Try another --device, and report what this is.")
        self._manager = manager
        if manager.impl == "cpu" and importlib.util.find_spec("numba") is None:
            return Check("kernel", WARNING, what, "Scores are right, and slower: pip install 'probemon[cpu]'.")
        return Check("kernel", OK, what)

    def _sing(self) -> None:
        missing = "model" if self.host is None else "kernel"
        if self.host is None or self._manager is None:
            self.checks.append(Check("canary", WARNING, f"not tried, for want of a {missing}", _NOT_TRIED))
            return
        remedy = "See the checks above; docs/compatibility.md says which models and modes are exact."
        self._try("canary", remedy, self._hear, self._manager)

    def _hear(self, manager: DynamicProbeManager) -> Check:
        canary = Canary(manager, self.host, self.tokenizer, n_tokens=_CANARY_TOKENS, **_padding(self.host))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit check reports other weights
            canary.sing()  # warm-up
            song = canary.sing()
            difference = canary.compare(song)
        self.checks += song.health.wrong
        return Check(
            "canary",
            OK,
            f"{len(song.scores)} tokens have the scores of an unwatched run's states (within {difference:.1g}), and the"
            f" same text; our hooks took {1e3 * song.hook_seconds:.2f} ms of a token, the model about"
            f" {1e3 * canary.plain_seconds:.0f} ms",
        )


def _versions() -> Check:
    versions, problems = [f"probemon {__version__}", f"Python {platform.python_version()}"], []
    try:
        requirements = importlib.metadata.requires("probemon") or []
    except importlib.metadata.PackageNotFoundError:
        what = f"{', '.join(versions)}, which is not installed: what it needs is unknown"
        return Check("versions", WARNING, what, "Install it with pip.")
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing, {requirement.specifier} is needed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} is {version}, {requirement.specifier} is needed")
        elif requirement.name in ("torch", "transformers"):
            versions.append(f"{requirement.name} {version}")
    if problems:
        return Check("versions", FAILED, "; ".join(problems), "Install what is needed: pip install --upgrade probemon.")
    compilers = [name for name in ("numba", "triton") if importlib.util.find_spec(name)]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in compilers]
    return Check("versions", OK, ", ".join(versions))


def _threads() -> Check:
    n_threads = torch.get_num_threads()
    n_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    what = f"{n_threads} threads of torch on {n_cpus} CPUs"
    if n_threads > n_cpus:
        remedy = f"More threads than CPUs wait for one another: give --threads {n_cpus}, or OMP_NUM_THREADS={n_cpus}."
        return Check("threads", WARNING, what, remedy)
    return Check("threads", OK, what)


def _golden_difference(manager: DynamicProbeManager) -> float:
    """Return the largest difference from golden scores, or 0."""
    pack = manager.pack
    if not isinstance(pack, ProbePack) or pack.golden_hidden is None or pack.golden_scores is None:
        return 0.0
    states = {site: pack.golden_hidden[:, i].to(manager.device) for i, site in enumerate(pack.sites)}
    return float((manager.score_all(states) - pack.golden_scores).abs().max()) if len(pack.golden_hidden) else 0.0


def _padding(model: Any) -> dict[str, Any]:
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return (
        {} if config.pad_token_id is not None else {"pad_token_id": next((end for end in ends if end is not None), 0)}
    )
