"""What is billed, to whom, and the journals of what was done and what was refused."""

from django.db import models
from django.utils import timezone


class Account(models.Model):
    """Somebody who pays."""

    name = models.CharField(max_length=100, unique=True)

    def __str__(self) -> str:
        return self.name


class Invoice(models.Model):
    """What one account owes for one slot of one entry.

    The row belongs to its slot, so that `fence` sets the copies of that one slot apart and nothing
    else: an older leader's message for another slot, however long it has waited, has rows of its own.
    """

    account = models.ForeignKey(Account, models.CASCADE)
    tick_key = models.CharField(max_length=400)
    slot = models.DateTimeField()
    tariff = models.CharField(max_length=50)
    amount = models.PositiveIntegerField(default=0, help_text="in cents")
    #: The fence of the latest write; `fenced_update` lets no lower one through.
    fence = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["account", "tick_key"], name="one_invoice_for_each_slot")
        ]

    def __str__(self) -> str:
        return f"invoice {self.pk} for {self.tick_key}"


class Execution(models.Model):
    """One time that a task did its work. No constraint: work done twice has to show as two rows."""

    tick_key = models.CharField(max_length=400, db_index=True)
    epoch = models.PositiveBigIntegerField()
    attempt = models.PositiveIntegerField()
    worker_pid = models.PositiveIntegerField()
    created_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.tick_key} under epoch {self.epoch}"


class Refusal(models.Model):
    """One message that a worker refused to run, as `run_refused` told it."""

    tick_key = models.CharField(max_length=400, db_index=True)
    epoch = models.PositiveBigIntegerField()
    reason = models.TextField()
    worker_pid = models.PositiveIntegerField()
    created_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.tick_key} under epoch {self.epoch}: {self.reason}"
