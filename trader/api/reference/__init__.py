"""The texts of the OpenAPI document and of the page that teaches a language model to trade here."""
