"""Django settings, and Celery's among them under the prefix `CELERY_`."""

import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from celery.schedules import crontab

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = os.environ.get("SECRET_KEY", "an example has no secrets")
INSTALLED_APPS = ["invoices"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("BILLING_DB", str(BASE_DIR / "billing.sqlite3")),
        # Several workers write: readers go on in WAL mode, and a writer waits for its turn when its
        # transaction begins, where waiting is still possible.
        "OPTIONS": {
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
        },
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

CELERY_BROKER_URL = REDIS_URL
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TIMEZONE = "Europe/Berlin"

# The ledger has a database of its own, so that whoever flushes the queues leaves the epochs alone.
CELERY_LEADERBEAT_REDIS_URL = os.environ.get("LEDGER_URL", urlsplit(REDIS_URL)._replace(path="/1").geturl())
if "LEASE_TTL" in os.environ:
    CELERY_LEADERBEAT_LEASE_TTL = float(os.environ["LEASE_TTL"])

CELERY_BEAT_SCHEDULE = {
    # Each second is charged, also those that came due while nobody led.
    "charge-calls": {
        "task": "invoices.tasks.charge_calls",
        "schedule": timedelta(seconds=1),
        "options": {"leaderbeat": {"catch_up": "all"}},
    },
    # No policy of its own: of the slots that came due while nobody led, the latest is sent.
    "charge-storage": {
        "task": "invoices.tasks.charge_storage",
        "schedule": timedelta(seconds=5),
    },
    # Each minute, if it can be sent within half a minute; a later slot is missed, with the reason.
    "charge-lines": {
        "task": "invoices.tasks.charge_lines",
        "schedule": crontab(),
        "options": {"leaderbeat": {"catch_up": "all", "deadline": 30}},
    },
}
