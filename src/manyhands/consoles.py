"""What all commands share: where they print, and a sign of life while something takes minutes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="The same facts as JSON.")]


def show(renderable: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(renderable)


def busy(quiet: bool) -> Any:
    """A sign of life on standard error while something takes minutes."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet).status("measuring, which takes a few minutes ...")
