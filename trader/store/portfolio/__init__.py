"""SQL of snapshots, rollups and analytics."""
