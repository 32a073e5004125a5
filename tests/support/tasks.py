"""Tasks that the service runs in the background, as a test sees them: by their names."""

import asyncio


async def ended(name: str) -> None:
    """Wait for the tasks whose names begin so."""
    if tasks := [task for task in asyncio.all_tasks() if task.get_name().startswith(name)]:
        await asyncio.wait(tasks)
