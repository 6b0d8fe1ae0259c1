"""What a study keeps: records of trials, in a database that workers share, a journal, and a cache across studies."""
