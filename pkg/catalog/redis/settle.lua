-- Settles one attempt: its receipt if it was applied, else the attempt is void from now on.
local P, receipt, attempt, life_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local raw = redis.call('GET', P .. 'c:' .. receipt)
if raw then return raw end
redis.call('SET', P .. 'd:' .. attempt, '1', 'PX', life_ms)
return false
