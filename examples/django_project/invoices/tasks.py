"""Periodic charges. Each is for its slot, never for "now", and is written under the fence of its run."""

from __future__ import annotations

import os

from celery import shared_task
from django.db import transaction

from celery_leaderbeat import FencedTask
from invoices.fencing import fenced_update
from invoices.models import Account, Execution, Invoice

#: What one slot costs each account, in cents.
TARIFFS = {"calls": 1, "storage": 5, "support": 10, "lines": 60}


class ChargeTask(FencedTask):
    """A charge needs to know its slot, so a bare `.delay()` is refused."""

    abstract = True
    require_stamp = True


@shared_task(bind=True, base=ChargeTask)
def charge_calls(self: ChargeTask) -> None:
    """Charge the calls of the second that ends with the slot."""
    charge(self, "calls")


@shared_task(bind=True, base=ChargeTask)
def charge_storage(self: ChargeTask) -> None:
    """Charge what was stored at the slot."""
    charge(self, "storage")


@shared_task(bind=True, base=ChargeTask)
def charge_support(self: ChargeTask) -> None:
    """Charge the support that was open at the slot."""
    charge(self, "support")


@shared_task(bind=True, base=ChargeTask)
def charge_lines(self: ChargeTask) -> None:
    """Charge the lines that were rented at the slot."""
    charge(self, "lines")


def charge(task: ChargeTask, tariff: str) -> None:
    """Write one invoice for each account, and a row in the journal, in one transaction."""
    tick = task.tick
    invoices = Invoice.objects.filter(tick_key=tick.key)
    with transaction.atomic():
        Invoice.objects.bulk_create(
            [
                Invoice(account=account, tick_key=tick.key, slot=tick.slot, tariff=tariff)
                for account in Account.objects.all()
            ],
            ignore_conflicts=True,
        )
        fenced_update(invoices, tick.fence, amount=TARIFFS[tariff])
        Execution.objects.create(
            tick_key=tick.key, epoch=tick.epoch, attempt=tick.attempt, worker_pid=os.getpid()
        )
