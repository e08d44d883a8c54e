"""The Celery app, with one more periodic task than the settings hold."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "billing_site.settings")

app = Celery("billing_site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_finalize.connect
def add_entries(sender: Celery, **kwargs: object) -> None:
    """Entries that are added in code take a policy too; it travels among the entry's options."""
    sender.add_periodic_task(
        10.0,
        sender.signature("invoices.tasks.charge_support"),
        name="charge-support",
        leaderbeat={"prefer": "duplicate", "deadline": 60},
    )
