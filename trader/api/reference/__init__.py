"""The page to read at `/api/docs`: the OpenAPI document as HTML."""
