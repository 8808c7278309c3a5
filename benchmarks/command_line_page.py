"""Writes the table of commands in docs/use/command-line.md from the code of the command line.

python benchmarks/command_line_page.py
"""

from __future__ import annotations

import re

import typer.core
import typer.main
from harness import ROOT
from markdown_page import in_place, line, table

from scheduler.cli.app import app

PAGE = ROOT / "docs" / "use" / "command-line.md"
# Options of several commands, which the page explains once.
SHARED = frozenset(
    {"--json", "--hardware", "--device", "--seed", "--own", "--workers", "--compile-timeout", "--run-timeout"}
)
PAGES = {  # the page that explains a command
    "tune": "tuning.md",
    "tune-job": "tuning.md#jobs",
    "tune-missed": "tuning.md#misses",
    "replay": "tuning.md#sweeps-replays-calibration",
    "extract": "extract.md",
    "shards": "tensor-parallel.md#one-problem",
    "sweep": "tuning.md#sweeps-replays-calibration",
    "calibrate": "tuning.md#sweeps-replays-calibration",
    "verify": "tuning.md#after-an-upgrade",
    "misses": "tuning.md#misses",
    "plot": "pictures.md",
    "report": "report.md",
    "export": "cache.md",
    "import": "cache.md",
    "check-records": "cache.md#sharing-records",
}


def main() -> None:
    PAGE.write_text(with_commands(PAGE.read_text()))
    print(PAGE.relative_to(ROOT))


def with_commands(document: str) -> str:
    """The page with today's table in its place."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    rows = [*table("command", "purpose", "options", left=3)]
    for name, command in group.commands.items():
        purpose = re.split(r"[;.] |;|\.?\n|\.$", command.help or "")[0]
        arguments = [_argument(each) for each in command.params if each.param_type_name == "argument"]
        options = [each.opts[0] for each in command.params if each.param_type_name == "option"]
        link = f"[`{name}`]({PAGES[name]})" if name in PAGES else f"`{name}`"
        usage = f" `{' '.join(arguments)}`" if arguments else ""
        own = ", ".join(f"`{option}`" for option in options if option not in SHARED)
        rows.append(line(link + usage, purpose.replace("|", r"\|"), own))
    return in_place(document, "command_line_page.py", rows)


def _argument(parameter: typer.core.TyperArgument) -> str:
    """The argument as a usage line has it: optional in brackets, several with dots."""
    name = (parameter.name or "").upper()
    return (name if parameter.required else f"[{name}]") + "..." * (parameter.nargs != 1)


if __name__ == "__main__":
    main()
