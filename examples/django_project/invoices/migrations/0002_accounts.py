"""Three accounts, so that there is somebody to bill."""

from django.db import migrations


def add_accounts(apps, schema_editor):
    """Add them."""
    account = apps.get_model("invoices", "Account")
    account.objects.bulk_create([account(name=name) for name in ("Alder & Sons", "Birch Ltd", "Cedar Co")])


class Migration(migrations.Migration):
    """Going back leaves the accounts: they may have invoices."""

    dependencies = [("invoices", "0001_initial")]
    operations = [migrations.RunPython(add_accounts, migrations.RunPython.noop)]
