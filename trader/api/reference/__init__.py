"""The texts of the OpenAPI document, its types in TypeScript, and what teaches a language model to trade here."""
