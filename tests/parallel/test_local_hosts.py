"""One group of local SGD for each host, where ranks count as two hosts."""

from tests.helpers.spawn import spawn


def test_groups_of_hosts():
    case = "tests.parallel.cases_local_sgd:groups_of_hosts"
    results = spawn(4, [case], 120.0, {"TFSCALE_RANKS_PER_HOST": "2"})
    bad = [r for r in results if r.status != "ok"]
    assert not bad, "\n".join(f"rank {r.rank}: {r.status}\n{r.text}" for r in bad)
