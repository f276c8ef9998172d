"""Opens what is watched inside vLLM, for the client and the worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from probemon.errors import ConfigError
from probemon.manager import DynamicProbeManager
from probemon.monitor.change import DeploymentFile
from probemon.monitor.rule_spec import Rule
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.vllm.messages import WorkerSettings
from probemon.packs.group import AnyPack, PackGroup


def open_manager(settings: WorkerSettings, device: str = "cpu") -> DynamicProbeManager:
    """Return a manager. Raises `ConfigError` if it differs from the client's, or cannot be watched in an engine."""
    if settings.deployment:
        manager = DynamicProbeManager.from_deployment(settings.deployment, device=device)
        assert manager.deployment is not None
        check_rules(manager.deployment.rules(manager.pack), manager.pack)
    else:
        packs: Any = settings.packs[0] if len(settings.packs) == 1 else list(settings.packs)
        manager = DynamicProbeManager(packs, device=device, **settings.cascade)
    if tuple(manager.pack.sites) != tuple(settings.sites):
        raise ConfigError(
            f"the settings of the worker name the sites {list(settings.sites)}, its packs read"
            f" {list(manager.pack.sites)}: vLLM's compiled graphs are told apart by what is named"
        )
    if watched_sha256(manager.pack, manager.deployment, settings.cascade) != settings.sha256:
        raise ConfigError(
            "what is watched is another than when the settings of the worker were made: a file was edited meanwhile."
            " Start again"
        )
    return manager


def watched_sha256(pack: AnyPack, deployment: DeploymentFile | None, cascade: Mapping[str, Any]) -> str:
    """Return the hash of packs with their alert sets, file and settings."""
    packs = pack.packs if isinstance(pack, PackGroup) else {"": pack}
    what = {
        "packs": {name: [one.manifest, one.alert_set] for name, one in packs.items()},
        "deployment": "" if deployment is None else deployment.sha256,
        "cascade": dict(cascade),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def check_parts(deployment: Deployment) -> None:
    """Raise `DeploymentError` for a part that has no effect inside an engine."""
    if "drift" in deployment.content:
        raise deployment.refused(
            "drift", "inside vLLM nothing compares requests with a reference: leave it out, or use probemon serve"
        )


def check_rules(rules: Sequence[Rule], pack: AnyPack) -> None:
    """Raise `ConfigError` for a rule that cannot work inside an engine."""
    for rule in rules:
        if "raise" in rule.actions:
            raise ConfigError(
                f"the rule on {pack.concepts[rule.probe]['id']} raises: inside vLLM an error would end the requests of"
                " all. Use stop, which ends its own, or record"
            )
