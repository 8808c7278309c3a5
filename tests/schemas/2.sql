BEGIN TRANSACTION;
CREATE TABLE constants (
             hardware TEXT NOT NULL, operation TEXT NOT NULL, backend TEXT NOT NULL,
             kernel_version BIGINT NOT NULL, date TEXT NOT NULL, calibration TEXT NOT NULL,
             PRIMARY KEY (hardware, operation, backend));
INSERT INTO "constants" VALUES('NVIDIA H200 (132 cores, 140 GiB)','matmul','mosaic_gpu',3,'2026-03-01T12:00:00Z','{"format": 1, "hardware": "NVIDIA H200 (132 cores, 140 GiB)", "operation": "matmul", "backend": "mosaic_gpu", "version": 3, "constants": {"e_hbm": 0.9, "p": 5.0}, "problems": 4, "trials": 900, "error": 0.05, "environment": {"jax": "0.11.2", "jaxlib": "0.11.2", "driver": "580.95", "date": "2026-03-01T12:00:00Z"}}');
CREATE TABLE decisions (key TEXT PRIMARY KEY, decision TEXT NOT NULL);
CREATE TABLE leases (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             owner TEXT NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
             PRIMARY KEY (operation, hardware, problem));
INSERT INTO "leases" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}','elsewhere/1/0',1772366400.0);
CREATE TABLE misses (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             lowered BIGINT NOT NULL, first TEXT NOT NULL, last TEXT NOT NULL, line TEXT NOT NULL, place TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem));
INSERT INTO "misses" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}',3,'2026-02-01T12:00:00Z','2026-02-02T12:00:00Z','/home/someone/model.py:41','');
CREATE TABLE ranges (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             field TEXT NOT NULL, low BIGINT NOT NULL, high BIGINT NOT NULL,
             date TEXT NOT NULL, range TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem, field, low, high));
INSERT INTO "ranges" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"n":256}','m',1,256,'2026-03-01T12:00:00Z','{"format": 1, "operation": "matmul", "hardware": "NVIDIA H200 (132 cores, 140 GiB)", "problem": {"dtype": "bfloat16", "k": 512, "n": 256}, "field": "m", "low": 1, "high": 256, "points": [1, 256], "environment": {"jax": "0.11.2", "jaxlib": "0.11.2", "driver": "580.95", "date": "2026-03-01T12:00:00Z"}, "held_out": []}');
CREATE TABLE schedules (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             median_s DOUBLE PRECISION NOT NULL, xla_s DOUBLE PRECISION,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             record TEXT NOT NULL, pattern TEXT, estimated BIGINT, size DOUBLE PRECISION, size_0 DOUBLE PRECISION, size_1 DOUBLE PRECISION, size_2 DOUBLE PRECISION, size_3 DOUBLE PRECISION,
             PRIMARY KEY (operation, hardware, problem));
INSERT INTO "schedules" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}','mosaic_gpu',3,'{"persistent": true, "split": "m", "tile_m": 128}',0.0001,0.0002,'0.11.2','0.11.2','580.95','2026-03-01T12:00:00Z','{"format": 1, "operation": "matmul", "hardware": "NVIDIA H200 (132 cores, 140 GiB)", "problem": {"dtype": "bfloat16", "k": 512, "m": 256, "n": 256}, "entries": [{"backend": "mosaic_gpu", "version": 3, "schedule": {"persistent": true, "split": "m", "tile_m": 128}, "predicted_s": 0.00012, "measurement": {"median_s": 0.0001, "samples_s": [0.0001, 0.00011, 9e-05], "clock": "cupti", "l2": "cold"}}, {"backend": "xla", "version": 1, "schedule": {}, "predicted_s": 0.00021, "measurement": {"median_s": 0.0002, "samples_s": [0.0002], "clock": "cupti", "l2": "cold"}}], "versions": {"mosaic_gpu": 3, "xla": 1}, "environment": {"jax": "0.11.2", "jaxlib": "0.11.2", "driver": "580.95", "date": "2026-03-01T12:00:00Z"}, "budget": 64, "tried": 60, "space": 3000}','9bf31f0488f1575c',0,25.0,9.0,8.0,8.0,0.0);
CREATE TABLE schema_version (version BIGINT NOT NULL);
INSERT INTO "schema_version" VALUES(2);
CREATE TABLE searches (
             id INTEGER PRIMARY KEY,
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL, study TEXT NOT NULL,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             finished BIGINT NOT NULL DEFAULT 0);
CREATE INDEX schedules_by_place ON schedules (operation, hardware, pattern, estimated, size, size_0, size_1, size_2, size_3);
CREATE INDEX searches_by_key ON searches (operation, hardware, problem);
CREATE INDEX searches_unfinished ON searches (operation, hardware, problem) WHERE finished = 0;
COMMIT;
