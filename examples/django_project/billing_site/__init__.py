"""A small billing site whose periodic tasks are sent by `celery_leaderbeat`."""

from billing_site.celery import app as celery_app

__all__ = ["celery_app"]
