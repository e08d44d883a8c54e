"""`fenced_update` of the Django example, on SQLite, through real connections."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

django = pytest.importorskip("django", minversion="5.1")

PROJECT = Path(__file__).resolve().parents[2] / "examples" / "django_project"

OLD, NEW = 1_000_000_005, 1_000_000_006


@pytest.fixture(scope="session")
def _database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example's app on a temporary database. Its Celery app isn't imported: it would become the current one."""
    from django.conf import settings

    sys.path.insert(0, str(PROJECT))
    settings.configure(
        INSTALLED_APPS=["invoices"],
        USE_TZ=True,
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(tmp_path_factory.mktemp("example") / "billing.sqlite3"),
                "OPTIONS": {
                    "init_command": "PRAGMA journal_mode=WAL",
                    "timeout": 20,
                    "transaction_mode": "IMMEDIATE",
                },
            }
        },
    )
    django.setup()
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", verbosity=0)
    yield
    connections.close_all()
    sys.path.remove(str(PROJECT))


@pytest.fixture
def invoice(_database: None) -> Iterator[Any]:
    """One invoice that nobody has written yet."""
    from django.utils import timezone
    from invoices.models import Account, Invoice

    yield Invoice.objects.create(
        account=Account.objects.first(),
        tick_key="calls@2026-10-02T03:00:00Z",
        slot=timezone.now(),
        tariff="calls",
    )
    Invoice.objects.all().delete()


@pytest.fixture
def fenced_update(_database: None) -> Callable[..., int]:
    from invoices.fencing import fenced_update

    return fenced_update


def unguarded_update(queryset: Any, fence: int, **values: Any) -> int:
    """`fenced_update` with its guard taken out."""
    return queryset.update(fence=fence, **values)


def check_then_update(queryset: Any, fence: int, **values: Any) -> int:
    """A guard that looks right and isn't: it reads, and then it writes."""
    from invoices.fencing import StaleWrite

    for row in queryset:
        if row.fence > fence:
            raise StaleWrite(str(row), row.fence, fence)
    return queryset.update(fence=fence, **values)


def rows(invoice: Any) -> Any:
    return type(invoice).objects.filter(pk=invoice.pk)


def stale_write_after_the_new_leaders(invoice: Any, update: Callable[..., int]) -> bool:
    """Let the new leader's work write, then the old one's. Return whether the old one was refused."""
    from invoices.fencing import StaleWrite

    assert update(rows(invoice), NEW, amount=60) == 1
    try:
        update(rows(invoice), OLD, amount=1)
    except StaleWrite:
        return True
    return False


def stale_write_that_waits_for_the_new_leaders(invoice: Any, update: Callable[..., int]) -> bool:
    """Begin the old leader's write while the new one's is open, on another connection.

    Whatever the old one reads before it has the write lock was true before the new one's commit.
    Return whether the old one was refused.
    """
    from django.db import connection, transaction
    from invoices.fencing import StaleWrite

    writing = threading.Event()
    refused: list[bool] = []

    def tell(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if sql.startswith(("BEGIN", "UPDATE")):
            writing.set()
        return execute(sql, *args)

    def old_leaders_work() -> None:
        try:
            with connection.execute_wrapper(tell):
                update(rows(invoice), OLD, amount=1)
            refused.append(False)
        except StaleWrite:
            refused.append(True)
        finally:
            writing.set()
            connection.close()

    thread = threading.Thread(target=old_leaders_work)
    with transaction.atomic():
        update(rows(invoice), NEW, amount=60)
        thread.start()
        assert writing.wait(10)
    thread.join(30)
    assert not thread.is_alive()
    return refused == [True]


STALE_WRITERS = [stale_write_after_the_new_leaders, stale_write_that_waits_for_the_new_leaders]


@pytest.mark.parametrize("stale_writer", STALE_WRITERS)
def test_a_stale_writer_is_refused_and_changes_nothing(
    invoice: Any, fenced_update: Callable[..., int], stale_writer: Callable[..., bool]
) -> None:
    assert stale_writer(invoice, fenced_update)
    invoice.refresh_from_db()
    assert (invoice.amount, invoice.fence) == (60, NEW)


@pytest.mark.parametrize("stale_writer", STALE_WRITERS)
def test_without_the_guard_the_stale_writer_wins(invoice: Any, stale_writer: Callable[..., bool]) -> None:
    assert not stale_writer(invoice, unguarded_update)
    invoice.refresh_from_db()
    assert (invoice.amount, invoice.fence) == (1, OLD)


def test_a_check_before_the_write_is_no_guard(invoice: Any) -> None:
    assert not stale_write_that_waits_for_the_new_leaders(invoice, check_then_update)
    invoice.refresh_from_db()
    assert (invoice.amount, invoice.fence) == (1, OLD)


def test_two_writers_at_once_leave_the_newer_ones_values(
    invoice: Any, fenced_update: Callable[..., int]
) -> None:
    from django.db import connection
    from invoices.fencing import StaleWrite

    rounds = 50
    start = threading.Barrier(2)
    refused = {OLD: 0, NEW: 0}
    errors: list[BaseException] = []

    def writer(epoch: int, amount: int) -> None:
        pauses = random.Random(epoch)
        try:
            for number in range(rounds):
                start.wait(10)
                time.sleep(pauses.random() / 1000)
                try:
                    fenced_update(rows(invoice), epoch + 2 * number, amount=amount + number)
                except StaleWrite:
                    refused[epoch] += 1
                start.wait(10)
                if epoch == NEW:
                    invoice.refresh_from_db()
                    assert (invoice.amount, invoice.fence) == (amount + number, epoch + 2 * number)
        except BaseException as error:  # noqa: BLE001 - the main thread has to see it, whatever it is
            errors.append(error)
            start.abort()
        finally:
            connection.close()

    threads = [
        threading.Thread(target=writer, args=(OLD, 1000)),
        threading.Thread(target=writer, args=(NEW, 2000)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert refused[NEW] == 0


def test_the_refusal_names_the_row_and_both_fences(invoice: Any, fenced_update: Callable[..., int]) -> None:
    from invoices.fencing import StaleWrite

    fenced_update(rows(invoice), NEW, amount=60)
    with pytest.raises(StaleWrite) as refusal:
        fenced_update(rows(invoice), OLD, amount=1)
    assert (refusal.value.row_fence, refusal.value.fence) == (NEW, OLD)
    for part in (str(invoice), str(NEW), str(OLD)):
        assert part in str(refusal.value)


def test_the_same_fence_may_write_again_and_a_newer_one_takes_over(
    invoice: Any, fenced_update: Callable[..., int]
) -> None:
    assert fenced_update(rows(invoice), OLD, amount=1) == 1
    assert fenced_update(rows(invoice), OLD, amount=2) == 1
    assert fenced_update(rows(invoice), NEW, amount=3) == 1
    invoice.refresh_from_db()
    assert (invoice.amount, invoice.fence) == (3, NEW)


def test_one_newer_row_refuses_the_whole_write(invoice: Any, fenced_update: Callable[..., int]) -> None:
    from invoices.fencing import StaleWrite
    from invoices.models import Account, Invoice

    other = Invoice.objects.create(
        account=Account.objects.last(), tick_key=invoice.tick_key, slot=invoice.slot, tariff="calls"
    )
    fenced_update(rows(other), NEW, amount=60)
    with pytest.raises(StaleWrite):
        fenced_update(Invoice.objects.filter(tick_key=invoice.tick_key), OLD, amount=1)
    assert sorted(Invoice.objects.values_list("amount", "fence")) == [(0, 0), (60, NEW)]


def test_no_row_is_no_refusal(invoice: Any, fenced_update: Callable[..., int]) -> None:
    assert fenced_update(type(invoice).objects.filter(tick_key="another slot"), OLD, amount=1) == 0


def test_the_write_is_one_update_that_compares_fences(
    invoice: Any, fenced_update: Callable[..., int]
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as queries:
        fenced_update(rows(invoice), OLD, amount=1)
    updates = [query["sql"] for query in queries if query["sql"].startswith("UPDATE")]
    assert len(updates) == 1
    assert f'"fence" <= {OLD}' in updates[0]
