"""The fields of a request, with their bounds, as the HTTP API and `rapid.open` take them.

They are validated strictly: `"1"` is not a number, and an unknown field is refused. Both ways to
ask refuse the same values in the same words. A message of a validator continues the name of its
field, which `bad_request` puts before it.
"""
