"""The tables of the app."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    """Accounts, their invoices, and the two journals."""

    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Account",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=100, unique=True)),
            ],
        ),
        migrations.CreateModel(
            name="Execution",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tick_key", models.CharField(db_index=True, max_length=400)),
                ("epoch", models.PositiveBigIntegerField()),
                ("attempt", models.PositiveIntegerField()),
                ("worker_pid", models.PositiveIntegerField()),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
            ],
        ),
        migrations.CreateModel(
            name="Refusal",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tick_key", models.CharField(db_index=True, max_length=400)),
                ("epoch", models.PositiveBigIntegerField()),
                ("reason", models.TextField()),
                ("worker_pid", models.PositiveIntegerField()),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
            ],
        ),
        migrations.CreateModel(
            name="Invoice",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tick_key", models.CharField(max_length=400)),
                ("slot", models.DateTimeField()),
                ("tariff", models.CharField(max_length=50)),
                ("amount", models.PositiveIntegerField(default=0, help_text="in cents")),
                ("fence", models.PositiveBigIntegerField(default=0)),
                (
                    "account",
                    models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="invoices.account"),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("account", "tick_key"), name="one_invoice_for_each_slot")
                ],
            },
        ),
    ]
