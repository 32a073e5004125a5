"""The wire: procedures, streams and health over HTTP."""
