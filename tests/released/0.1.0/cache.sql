BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('v3.2.0.a');
CREATE TABLE constants (
             hardware TEXT NOT NULL, operation TEXT NOT NULL, backend TEXT NOT NULL,
             kernel_version BIGINT NOT NULL, date TEXT NOT NULL, calibration TEXT NOT NULL,
             PRIMARY KEY (hardware, operation, backend));
INSERT INTO "constants" VALUES('NVIDIA H200 (132 cores, 140 GiB)','matmul','mosaic_gpu',3,'2026-03-01T12:00:00Z','{"format": 1, "hardware": "NVIDIA H200 (132 cores, 140 GiB)", "operation": "matmul", "backend": "mosaic_gpu", "version": 3, "constants": {"e_hbm": 0.9, "p": 5.0}, "problems": 4, "trials": 900, "error": 0.05, "environment": {"jax": "0.11.2", "jaxlib": "0.11.2", "driver": "580.95", "date": "2026-03-01T12:00:00Z"}, "observations": [], "variants": []}');
CREATE TABLE decisions (key TEXT PRIMARY KEY, decision TEXT NOT NULL);
INSERT INTO "decisions" VALUES('0000000000000000000000000000000000000000000000000000000000000000','1111111111111111111111111111111111111111111111111111111111111111 {}');
CREATE TABLE leases (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             owner TEXT NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
             PRIMARY KEY (operation, hardware, problem));
INSERT INTO "leases" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}','elsewhere/1/0',7.95982039073735475522e+08);
CREATE TABLE misses (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             lowered BIGINT NOT NULL, first TEXT NOT NULL, last TEXT NOT NULL, line TEXT NOT NULL, place TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem));
INSERT INTO "misses" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}',3,'2026-02-01T12:00:00Z','2026-02-02T12:00:00Z','model.py:41','');
CREATE TABLE schedules (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             median_s DOUBLE PRECISION NOT NULL, xla_s DOUBLE PRECISION,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             record TEXT NOT NULL,
             pattern TEXT, estimated BIGINT, size DOUBLE PRECISION,
             size_0 DOUBLE PRECISION, size_1 DOUBLE PRECISION, size_2 DOUBLE PRECISION, size_3 DOUBLE PRECISION,
             PRIMARY KEY (operation, hardware, problem));
INSERT INTO "schedules" VALUES('matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}','mosaic_gpu',3,'{"persistent": true, "split": "m", "tile_m": 128}',0.0001,0.0002,'0.11.2','0.11.2','580.95','2026-03-01T12:00:00Z','{"format": 1, "operation": "matmul", "hardware": "NVIDIA H200 (132 cores, 140 GiB)", "problem": {"dtype": "bfloat16", "k": 512, "m": 256, "n": 256}, "entries": [{"backend": "mosaic_gpu", "version": 3, "schedule": {"persistent": true, "split": "m", "tile_m": 128}, "predicted_s": 0.00012, "measurement": {"median_s": 0.0001, "samples_s": [0.0001, 0.00011, 9e-05], "clock": "cupti", "l2": "cold"}}, {"backend": "xla", "version": 1, "schedule": {}, "predicted_s": 0.00021, "measurement": {"median_s": 0.0002, "samples_s": [0.0002], "clock": "cupti", "l2": "cold"}}], "versions": {"mosaic_gpu": 3, "xla": 1}, "environment": {"jax": "0.11.2", "jaxlib": "0.11.2", "driver": "580.95", "date": "2026-03-01T12:00:00Z"}, "budget": 64, "tried": 60, "space": 3000}','9bf31f0488f1575c',0,25.0,9.0,8.0,8.0,0.0);
CREATE TABLE schema_version (version BIGINT NOT NULL);
INSERT INTO "schema_version" VALUES(2);
CREATE TABLE searches (
             id INTEGER PRIMARY KEY,
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL, study TEXT NOT NULL,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             finished BIGINT NOT NULL DEFAULT 0);
INSERT INTO "searches" VALUES(1,'matmul','NVIDIA H200 (132 cores, 140 GiB)','{"dtype":"bfloat16","k":512,"m":256,"n":256}','matmul m=256 n=256 k=512 dtype=bfloat16 on NVIDIA H200 (132 cores, 140 GiB), 2026-03-01T12:00, a322ad','0.11.2','0.11.2','580.95','2026-03-01T12:00:00Z',0);
CREATE TABLE studies (
	study_id INTEGER NOT NULL, 
	study_name VARCHAR(512) NOT NULL, 
	PRIMARY KEY (study_id)
);
INSERT INTO "studies" VALUES(1,'matmul m=256 n=256 k=512 dtype=bfloat16 on NVIDIA H200 (132 cores, 140 GiB), 2026-03-01T12:00, a322ad');
CREATE TABLE study_directions (
	study_direction_id INTEGER NOT NULL, 
	direction VARCHAR(8) NOT NULL, 
	study_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	PRIMARY KEY (study_direction_id), 
	UNIQUE (study_id, objective), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_directions" VALUES(1,'MINIMIZE',1,0);
CREATE TABLE study_system_attributes (
	study_system_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_system_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_system_attributes" VALUES(1,1,'study:metric_names','["median time in us"]');
CREATE TABLE study_user_attributes (
	study_user_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_user_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_user_attributes" VALUES(1,1,'operation','"matmul"');
INSERT INTO "study_user_attributes" VALUES(2,1,'hardware','"NVIDIA H200 (132 cores, 140 GiB)"');
INSERT INTO "study_user_attributes" VALUES(3,1,'problem','"{\"dtype\":\"bfloat16\",\"k\":512,\"m\":256,\"n\":256}"');
INSERT INTO "study_user_attributes" VALUES(4,1,'jax','"0.11.2"');
INSERT INTO "study_user_attributes" VALUES(5,1,'jaxlib','"0.11.2"');
INSERT INTO "study_user_attributes" VALUES(6,1,'driver','"580.95"');
INSERT INTO "study_user_attributes" VALUES(7,1,'date','"2026-03-01T12:00:00Z"');
CREATE TABLE trial_heartbeats (
	trial_heartbeat_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	heartbeat DATETIME NOT NULL, 
	PRIMARY KEY (trial_heartbeat_id), 
	UNIQUE (trial_id), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_intermediate_values (
	trial_intermediate_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	intermediate_value FLOAT, 
	intermediate_value_type VARCHAR(7) NOT NULL, 
	PRIMARY KEY (trial_intermediate_value_id), 
	UNIQUE (trial_id, step), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_params (
	param_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	param_name VARCHAR(512), 
	param_value FLOAT, 
	distribution_json TEXT, 
	PRIMARY KEY (param_id), 
	UNIQUE (trial_id, param_name), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_system_attributes (
	trial_system_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_system_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_user_attributes (
	trial_user_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_user_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_user_attributes" VALUES(1,1,'trial','"{\"number\": 0, \"backend\": \"mosaic_gpu\", \"version\": 3, \"schedule\": {\"persistent\": true, \"split\": \"m\", \"tile_m\": 128}, \"predicted_s\": 0.00012, \"measurement\": {\"median_s\": 0.0001, \"samples_s\": [0.0001, 0.00011, 9e-05], \"clock\": \"cupti\", \"l2\": \"cold\"}}"');
INSERT INTO "trial_user_attributes" VALUES(2,1,'predicted_us','120.0');
INSERT INTO "trial_user_attributes" VALUES(3,1,'spread_us','10.0');
INSERT INTO "trial_user_attributes" VALUES(4,2,'trial','"{\"number\": 1, \"backend\": \"mosaic_gpu\", \"version\": 3, \"schedule\": {\"persistent\": true, \"split\": \"m\", \"tile_m\": 128}, \"predicted_s\": 0.00012, \"failure\": {\"stage\": \"compile\", \"detail\": \"too much shared memory\"}}"');
INSERT INTO "trial_user_attributes" VALUES(5,2,'predicted_us','120.0');
INSERT INTO "trial_user_attributes" VALUES(6,2,'failure','"compile: too much shared memory"');
CREATE TABLE trial_values (
	trial_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	value FLOAT, 
	value_type VARCHAR(7) NOT NULL, 
	PRIMARY KEY (trial_value_id), 
	UNIQUE (trial_id, objective), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_values" VALUES(1,1,0,100.0,'FINITE');
CREATE TABLE trials (
	trial_id INTEGER NOT NULL, 
	number INTEGER, 
	study_id INTEGER, 
	state VARCHAR(8) NOT NULL, 
	datetime_start DATETIME, 
	datetime_complete DATETIME, 
	PRIMARY KEY (trial_id), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "trials" VALUES(1,0,1,'COMPLETE','2026-11-29 19:53:59.023170','2026-11-29 19:53:59.023170');
INSERT INTO "trials" VALUES(2,1,1,'FAIL','2026-11-29 19:53:59.023228','2026-11-29 19:53:59.023228');
CREATE TABLE version_info (
	version_info_id INTEGER NOT NULL, 
	schema_version INTEGER, 
	library_version VARCHAR(256), 
	PRIMARY KEY (version_info_id), 
	CHECK (version_info_id=1)
);
INSERT INTO "version_info" VALUES(1,12,'5.0.0');
CREATE INDEX schedules_by_place ON schedules (operation, hardware, pattern, estimated, size, size_0, size_1, size_2, size_3);
CREATE INDEX searches_by_key ON searches (operation, hardware, problem);
CREATE INDEX searches_unfinished ON searches (operation, hardware, problem) WHERE finished = 0;
CREATE UNIQUE INDEX ix_studies_study_name ON studies (study_name);
CREATE INDEX ix_trials_study_id ON trials (study_id);
COMMIT;
