"""The deployment file of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from probemon.cli.common import check_beside_file

if TYPE_CHECKING:
    from probemon.ops.deployment.deployment import Deployment
    from probemon.packs.group import AnyPack


def open_deployment(path: Path, packs: object = None, alert_set: str | None = None) -> tuple[Deployment, AnyPack]:
    """Read a deployment and open its packs; errors appear before a model is loaded.

    Raises `ConfigError` if `packs` or `alert_set` are given in addition; `DeploymentError`, `PackError`.
    """
    from probemon.ops.deployment.cost import cost_of
    from probemon.ops.deployment.deployment import Deployment

    check_beside_file(packs, alert_set)
    deployment = Deployment.read(path)
    pack = deployment.open_packs()
    cost_of(deployment, pack)  # check that settings and rules fit
    deployment.check_parts(pack)
    return deployment, pack
