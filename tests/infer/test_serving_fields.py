"""docs/serving_fields.md says of every field what the server does with it."""

from __future__ import annotations

import re
from pathlib import Path

from laconic.infer.server.bodies import ChatBody, CompletionBody
from laconic.infer.server.unserved import NEUTRAL_IN_CHATS, NEUTRAL_IN_COMPLETIONS

PAGE = Path(__file__).parents[2] / "docs" / "serving_fields.md"


def test_the_table_is_what_bodies_are() -> None:
    told: dict[str, tuple[str, str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, ours = line.split("|")[1:3]
            for name, where in re.findall(r"`(\w+)`(?: \(([cm])\))?", names):
                assert name not in told, name
                told[name] = (ours.split()[0].rstrip(";,:"), where)
    bodies = {"c": (set(CompletionBody.model_fields), set(NEUTRAL_IN_COMPLETIONS))}
    bodies["m"] = (set(ChatBody.model_fields), set(NEUTRAL_IN_CHATS))
    for where, (served, neutral) in bodies.items():
        mine = {name for name, (_, own) in told.items() if own in ("", where)} | ({"echo"} if where == "m" else set())
        assert served | neutral == mine, (served | neutral) ^ mine
        for name in mine - {"echo"}:
            assert told[name][0] in (("refused",) if name in neutral else ("taken", "ignored")), name
