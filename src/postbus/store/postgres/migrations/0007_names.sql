-- Every name is looked up in pg_catalog, whoever calls: the functions run in sessions of the callers' own too, and a search
-- path that finds another md5() or = first would file deliveries where nobody looks. Those that a query is put into its
-- caller's plan for are bound now, which also settles what a backslash means in them; a search path would keep them out.
CREATE OR REPLACE FUNCTION postbus.now() RETURNS timestamptz LANGUAGE sql VOLATILE RETURN clock_timestamp();

CREATE OR REPLACE FUNCTION postbus.at(micros bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN to_timestamp(micros / 1000000.0::float8);

CREATE OR REPLACE FUNCTION postbus.micros(moment timestamptz) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (extract(epoch FROM moment) * 1000000)::bigint;

CREATE OR REPLACE FUNCTION postbus.namespace(stream text) RETURNS bigint LANGUAGE sql IMMUTABLE
    RETURN hashtextextended('postbus.' || stream, 0) & 32767;

CREATE OR REPLACE FUNCTION postbus.pins(stream text) RETURNS TABLE (pid integer, holder text, floor bigint)
    LANGUAGE sql STABLE BEGIN ATOMIC
    SELECT l.pid, l.virtualtransaction, (l.classid::bigint & 65535) << 32 | l.objid::bigint
      FROM pg_locks AS l
     WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
       AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND l.classid::bigint >> 16 = postbus.namespace(stream);
END;

CREATE OR REPLACE FUNCTION postbus.matches(pattern text, type text) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN pattern = '*' OR type LIKE
        replace(replace(replace(replace(pattern, '\', '\\'), '%', '\%'), '_', '\_'), '*', '%');

CREATE OR REPLACE FUNCTION postbus.wants(patterns jsonb, wanted jsonb, type text, tags text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN EXISTS (SELECT 1 FROM jsonb_array_elements_text(patterns) AS p WHERE postbus.matches(p, type))
       AND (wanted = '[]' OR EXISTS (SELECT 1 FROM jsonb_array_elements_text(wanted) AS t
                                      WHERE t = ANY (string_to_array(tags, ','))));

CREATE OR REPLACE FUNCTION postbus.sorted(tags text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN strpos(tags, ',') = 0 THEN tags
                ELSE (SELECT string_agg(t, ',' ORDER BY t COLLATE "C") FROM unnest(string_to_array(tags, ',')) AS t) END;

CREATE OR REPLACE FUNCTION postbus.route_id(subscription text, priority integer, type text, tags text, solo boolean)
    RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ('x' || left(md5(concat_ws(chr(31), subscription, priority::text, type, tags, solo::integer::text)), 16)
           )::bit(64)::bigint;

CREATE OR REPLACE FUNCTION postbus.digest(type text, payload text, tags text, key text, title text, description text)
    RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN md5(json_build_array(type, payload, postbus.sorted(tags), key, title, description)::text);

ALTER FUNCTION postbus.pin_trigger() SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION postbus.register(bigint, text, integer, text, text, boolean) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION postbus.finish(bigint[], bigint[], float8[], text, text, timestamptz) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION postbus.move_lightly(text, bigint, bigint) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION postbus.publish_part(bigint, bigint, bigint) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION postbus.read_on(bigint, bigint) SET search_path = pg_catalog, pg_temp;
