"""SQL of snapshots, rollups, analytics and seasons."""
