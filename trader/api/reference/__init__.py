"""The human-readable page at `/api/docs`: the OpenAPI document as HTML."""
