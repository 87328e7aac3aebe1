"""The paper model of bytes sent, and its tables in the documentation."""

from itertools import combinations
from pathlib import Path

import pytest

from moeblaze_megatron import scaling

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


@pytest.mark.parametrize(("ep", "topk", "experts"), [(2, 2, 6), (3, 3, 9), (4, 2, 4), (4, 5, 8)])
def test_ranks_per_token_by_enumeration(ep, topk, experts):
    routings = list(combinations(range(experts), topk))
    ranks = sum(len({e // (experts // ep) for e in routing}) for routing in routings)
    assert scaling.ranks_per_token(ep, topk, experts) == pytest.approx(ranks / len(routings))


def test_ranks_per_token_of_many_experts():
    assert scaling.ranks_per_token(8, 8) == pytest.approx(5.25, abs=5e-3)
    assert scaling.ranks_per_token(8, 8, 8 * 10_000) == pytest.approx(5.25, abs=5e-3)


def test_traffic_of_one_exchange_by_hand():
    model = scaling.Model("", hidden=100, experts=4, topk=1, layers=1)
    sent = scaling.traffic(model, ep=2, tokens=10, by_rank=False)
    assert (sent.rows, sent.nbytes) == (1, 10 * (4 * 200 + 8) / 2)
    sent = scaling.traffic(model, ep=2, tokens=10, by_rank=True)
    assert (sent.rows, sent.nbytes) == (1, 10 * (4 * 200 + 10) / 2)


def test_page_holds_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scaling"])
    scaling.main()
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_no_tokens_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scaling", "--tokens", "0"])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "--tokens is 1 or more, got 0" in capsys.readouterr().err
