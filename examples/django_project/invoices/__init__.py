"""Invoices, one for each account and slot."""
