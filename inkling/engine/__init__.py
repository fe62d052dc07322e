"""Requests, pages and the speculation loop. Knows no layers."""
