"""Attention of ragged rows over paged KV, on every kind of device."""
