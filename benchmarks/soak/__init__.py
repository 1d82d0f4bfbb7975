"""Everything at once, for minutes: a real platform with random jobs, kills, full disks and hostile people."""
