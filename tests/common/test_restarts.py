"""The process group of restarted processes; tests/distributed/test_elastic.py restarts real ones."""

import pytest

from attractor.common.restarts import SCHEME, init_method


@pytest.mark.parametrize(
    ("count", "shared", "expected"),
    [("0", "True", None), ("1", "False", None), ("1", "True", f"{SCHEME}://")],
)
def test_only_restarted_processes_with_one_store_need_keys_of_their_own(
    monkeypatch, count, shared, expected
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert init_method() == expected


def test_restarts_on_several_machines_with_one_store_per_launch_raise(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        init_method()
