"""docs/megatron.md answers for every MoE-related field of the installed Megatron's config."""

import re
from pathlib import Path

from mcore_worker import in_megatron

from moeblaze_megatron.mcore.config import SETTINGS

DOCS = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text()
TESTS = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
ANSWERS = {"honoured", "passed through", "no effect", "refused"}


def names(cell):
    return re.findall(r"`(\w+)`", cell)


def rows(heading):
    """The cells of the table rows below a heading of the page."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", DOCS, re.M | re.S)[1]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in cells] for cells in lines]


ANSWERED = rows("Every MoE setting")
REFUSED = rows("What is refused")


@in_megatron
def test_every_moe_field_has_a_row():
    """A field whose name says so, or that a file of megatron/core/transformer/moe reads."""
    import dataclasses

    from megatron.core.transformer import moe
    from megatron.core.transformer.transformer_config import TransformerConfig

    (folder,) = moe.__path__
    source = "".join(path.read_text() for path in Path(folder).rglob("*.py"))
    read = set(re.findall(r"\bconfig\.(\w+)", source))
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    related = {name for name in fields if name in read or "moe" in name or "expert" in name}
    assert len(related) > 70
    answered = {name for cells in (*ANSWERED, *REFUSED) for name in names(cells[0])}
    assert not related - answered, f"no row in docs/megatron.md: {sorted(related - answered)}"


def test_every_field_has_one_row():
    answered = [name for cells in ANSWERED for name in names(cells[0])]
    refused = [setting.field for setting in SETTINGS]
    assert len(answered) == len(set(answered))
    assert not set(answered) & set(refused)
    assert set(refused) <= {name for cells in REFUSED for name in names(cells[0])}


def test_answers_are_known_and_tests_exist():
    for fields, answer, how in ANSWERED:
        assert answer in ANSWERS, fields
        tests = re.findall(r"`(test_\w+)(?:\[([^]]+)\])?`", how)
        assert tests or answer != "honoured", f"{fields} has no test"
        for test, case in tests:
            assert f"def {test}(" in TESTS, f"{fields}: no test {test}"
            assert not case or f'Case("{case}"' in TESTS or f'"{case}",\n' in TESTS, case
