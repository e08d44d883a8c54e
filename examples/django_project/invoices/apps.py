"""The app's configuration."""

import os
from typing import Any

from django.apps import AppConfig

from celery_leaderbeat.signals import run_refused


class InvoicesConfig(AppConfig):
    """Keeps a journal of the messages that the workers refuse."""

    name = "invoices"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Listen to the refusals of this process."""
        run_refused.connect(note_refusal)


def note_refusal(*, stamp: Any, reason: str, **kwargs: object) -> None:
    """Write one refusal down. A message without a stamp has no slot to name."""
    from invoices.models import Refusal

    if stamp is not None:
        Refusal.objects.create(tick_key=stamp.key, epoch=stamp.epoch, reason=reason, worker_pid=os.getpid())
