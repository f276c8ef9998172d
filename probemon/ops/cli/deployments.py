"""The deployment file of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from probemon.cli.common import check_beside_file

if TYPE_CHECKING:
    from probemon.ops.deployment.deployment import Deployment
    from probemon.packs.group import AnyPack


def open_deployment(path: Path, packs: object = None, alert_set: str | None = None) -> tuple[Deployment, AnyPack]:
    """Read a deployment and open its packs, once; what is wrong with it shows before a model is loaded.

    The other arguments are those of a command, which a deployment says already. Raises `ConfigError`,
    `DeploymentError`, `PackError`.
    """
    from probemon.ops.deployment.cost import cost_of
    from probemon.ops.deployment.deployment import Deployment

    check_beside_file(packs, alert_set)
    deployment = Deployment.read(path)
    pack = deployment.open_packs()
    cost_of(deployment, pack)  # its settings and rules fit the packs
    deployment.check_parts(pack)
    return deployment, pack
