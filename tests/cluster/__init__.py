"""Tests on an emulated cluster; they need root."""
