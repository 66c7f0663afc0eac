// made in the next commit
