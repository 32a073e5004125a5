"""The page to read at `/api/docs`: the OpenAPI document as one self-contained HTML file."""
