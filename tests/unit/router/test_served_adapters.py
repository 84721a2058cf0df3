"""Which LoRA adapters are served: those that workers report, unless another router unloads them."""

from __future__ import annotations

import pytest
from msgspec import structs

from pdserve.errors import Unavailable
from pdserve.types import Adapter, Role
from router.control.adapters import ServedAdapters
from router.fleet.member import Member
from tests.support.router_stack import MODEL, worker_info

OLD, NEW = (Adapter("tuned", digest, "/path", MODEL.name) for digest in ("old", "new"))


class Workers:
    """Two workers that report adapters, and what is served."""

    def __init__(self) -> None:
        self.served = ServedAdapters()
        self.first, self.second = (Member(worker_info(x, Role.AGGREGATED)) for x in "ab")

    def report(self, member: Member, *adapters: Adapter) -> Adapter | None:
        """Return the adapter that is served after this report."""
        found = {x.key: x for x in adapters}
        member.reported = structs.replace(member.reported, adapters=found)
        self.served.report(member, (self.first, self.second))
        return self.served.by_name.get("tuned")


@pytest.fixture
def workers() -> Workers:
    return Workers()


def test_an_adapter_is_served_from_its_first_report_until_a_worker_unloads_it(
    workers: Workers,
) -> None:
    assert workers.report(workers.first, OLD) == OLD
    assert workers.report(workers.second, OLD) == OLD
    assert workers.report(workers.first) is None
    assert workers.report(workers.second) is None


def test_a_replaced_adapter_is_served_until_a_worker_unloads_it(workers: Workers) -> None:
    workers.report(workers.first, OLD)
    workers.report(workers.second, OLD)
    assert workers.report(workers.first, OLD, NEW) == OLD
    assert workers.report(workers.first, NEW) == NEW
    assert workers.report(workers.second, OLD, NEW) == NEW


def test_an_adapter_of_a_lost_worker_stays_served_and_waits_for_another(workers: Workers) -> None:
    workers.report(workers.first, OLD)
    workers.first.lost = True
    assert workers.report(workers.second, OLD) == OLD


def test_reports_do_not_change_an_adapter_while_this_router_changes_it(workers: Workers) -> None:
    workers.served.begin_change("tuned")
    assert workers.report(workers.first, OLD) is None
    with pytest.raises(Unavailable, match="is being loaded or unloaded"):
        workers.served.begin_change("tuned")
    workers.served.serve(OLD)
    workers.served.end_change("tuned")
    assert workers.report(workers.first) is None
