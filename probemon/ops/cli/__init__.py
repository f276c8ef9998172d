"""Commands for a monitor in service."""

from probemon.cli.registry import Command

COMMANDS = (
    Command("serve", "probemon.ops.cli.serve:serve", "Serve MODEL: OpenAI's API with concepts, and a page."),
    Command("deploy", "probemon.ops.cli.deploy:deploy"),
    Command("vllm", "probemon.ops.cli.vllm:vllm"),
)
